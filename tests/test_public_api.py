"""What `import hfkvq` offers, and that it explains itself."""

import inspect
from pathlib import Path

import pytest

import hfkvq

ROOT = Path(__file__).resolve().parents[1]
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


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_every_public_name_has_a_docstring_of_its_own(name):
    doc = getattr(hfkvq, name).__doc__
    assert doc
    assert doc.strip()
    if inspect.isclass(getattr(hfkvq, name)):
        # A dataclass without a docstring gets its signature as one.
        assert not doc.startswith(f"{name}(")


def test_public_classes_are_documented_method_by_method():
    missing = [
        f"{name}.{method}"
        for name in sorted(PUBLIC)
        if inspect.isclass(cls := getattr(hfkvq, name))
        for method, function in vars(cls).items()
        if not method.startswith("_") and inspect.isfunction(function) and not inspect.getdoc(getattr(cls, method))
    ]
    assert missing == []
