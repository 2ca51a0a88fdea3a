"""Makes ``lm_eval --model hf-kvq`` work with releases of lm-eval that discover no plug-ins (0.4.13 and before).

Installed as ``_hfkvq_lm_eval.py`` beside the package and run at every start of the interpreter, by the file
``hfkvq_lm_eval.pth`` (and ``.start``, which takes its place from Python 3.15 on). It must therefore be small and import
nothing: it waits for ``lm_eval.models`` to be imported, and then adds a name to lm-eval's table of models. Releases
after 0.4.13 read the entry point in pyproject.toml and need none of this.
"""

import sys

WAITS_FOR = "lm_eval.models"
NAME, TARGET = "hf-kvq", "hfkvq.lm_eval.model:HFKVQ"


def register():
    """Adds the name, unless lm-eval has it already. lm-eval's own models must be there first, or it adds none."""
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)


class Finder:
    """Registers as soon as ``lm_eval.models`` has been imported, and goes away."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """The spec that other finders give, with a step added behind its execution."""
        if name != WAITS_FOR:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not cls]
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            try:
                register()
            except Exception as error:
                # A run that asks for another model must not fail by this.
                import logging

                logging.getLogger("hfkvq").warning("hf-kvq could not be registered with lm-eval: %s", error)

        spec.loader.exec_module = exec_module
        return spec


def install():
    """Registers now, or when ``lm_eval.models`` is imported."""
    if WAITS_FOR in sys.modules:
        register()
    elif Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
