"""What `import hfkvq` offers, and that it explains itself."""

import inspect

import hfkvq

PUBLIC = set(
    """
    ARKVCache ExpectedAttentionCache FullCache H2OCache KIVICache KVarNCache KittyCache LatentCache MixKVQCache
    MixedKVCache PrefixStore PyramidKVCache SawInt4Cache Scheme SnapKVCache StreamingLLMCache TOVACache
    TriAxialCache get_scheme list_schemes use watch __version__
    """.split()
)


def test_all_is_exactly_the_public_api():
    assert set(hfkvq.__all__) == PUBLIC
    assert len(hfkvq.__all__) == len(PUBLIC)


def test_public_classes_are_documented_method_by_method():
    missing = [
        f"{name}.{method}"
        for name in sorted(PUBLIC)
        if inspect.isclass(cls := getattr(hfkvq, name))
        for method, function in vars(cls).items()
        if not method.startswith("_") and inspect.isfunction(function) and not inspect.getdoc(getattr(cls, method))
    ]
    assert missing == []
