"""``hfkvq env``: what a report of a bug has to say of the machine."""

from __future__ import annotations

import os
import platform

import typer

app = typer.Typer()

PACKAGES = ("torch", "transformers", "triton", "accelerate", "safetensors", "lm-eval", "optuna", "liger-kernel")


def environment() -> dict[str, str]:
    """Versions, GPUs and settings, by what they are of."""
    import torch

    import hfkvq
    from hfkvq.measure.records import commit, versions

    found = versions(*PACKAGES)
    source = commit()
    # A package is named by its version; its folder stays private.
    said = {"hfkvq": f"{hfkvq.__version__}, {f'checkout at {source}' if source else 'package'}"}
    said |= {"python": str(found["python"]), "platform": platform.platform()}
    said |= {name: found[name] or "not installed" for name in PACKAGES}
    said["cpu"] = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    said["CUDA of torch"] = torch.version.cuda or "none"
    if not torch.cuda.is_available():
        said["GPU"] = "none"
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        room = about.total_memory / 2**30
        said[f"GPU {index}"] = f"{about.name}, {room:.0f} GiB, compute capability {about.major}.{about.minor}"
    return said


@app.command()
def env() -> None:
    """Show the versions and GPUs to name in a bug report."""
    said = environment()
    width = max(map(len, said))
    typer.echo("\n".join(f"{name:<{width}}  {value}" for name, value in said.items()))
