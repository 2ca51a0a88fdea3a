"""lm-eval's model ``hf-kvq``, and the tasks that really go through a compressed cache."""

from pathlib import Path

__all__ = ["task_folder"]


def task_folder() -> Path:
    """Folder of the task YAML, for lm-eval's ``--include_path``: in the package, or in a checkout's ``evals/``."""
    packaged = Path(__file__).parent / "tasks"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "evals" / "tasks"
