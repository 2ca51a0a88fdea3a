"""``python -m hfkvq.lm_eval ...``: lm-eval's own command line, which then knows the model ``hf-kvq``."""


def main() -> None:
    """Runs ``lm_eval`` with the same arguments."""
    try:
        import lm_eval.models  # noqa: F401 - its own models must be in its table before another is added.
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise SystemExit(f'lm-eval is missing ({error}); install it with: pip install "hfkvq[eval]"') from None

    # The module registers the model.
    import hfkvq.lm_eval.model  # noqa: F401

    cli_evaluate()


if __name__ == "__main__":
    main()
