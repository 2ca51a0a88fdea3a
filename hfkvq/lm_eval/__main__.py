"""``python -m hfkvq.lm_eval ...``: lm-eval's own command line, with ``hf-kvq`` and hfkvq's tasks known to it."""

import sys


def main() -> None:
    """Runs ``lm_eval`` with the same arguments; hfkvq's tasks are found without ``--include_path``."""
    try:
        import lm_eval.models  # noqa: F401 - its own models must be in its table before another is added.
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise SystemExit(f'lm-eval is missing ({error}); install it with: pip install "hfkvq[eval]"') from None

    # Registers itself.
    import hfkvq.lm_eval.model  # noqa: F401
    from hfkvq.lm_eval import task_folder

    runs = len(sys.argv) > 1 and sys.argv[1] not in ("-h", "--help")
    if runs and not any(argument.split("=")[0] == "--include_path" for argument in sys.argv):
        sys.argv += ["--include_path", str(task_folder())]
    cli_evaluate()


if __name__ == "__main__":
    main()
