"""CUDA C++ compiled when it is first needed, by the NVRTC that PyTorch came with, and launched through the driver."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

CLUSTER = 4
"""The driver's number for how many blocks make a cluster."""

SERIALIZED = 6
"""The driver's number for programmatic dependent launch: a kernel may start before the one in front has ended."""

CAPTURING = 1
"""The driver's number for a stream that is being captured."""

SHARED = 8
"""The driver's number for the most bytes of shared memory that a launch may ask for."""


class Unavailable(RuntimeError):
    """A kernel cannot be compiled or loaded here."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unavailable(f"the CUDA driver cannot be loaded: {error}") from error


@lru_cache(maxsize=1)
def _nvrtc() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise Unavailable("this PyTorch was built without CUDA.")
    name = f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}"
    # Where PyTorch has not loaded it yet, it lies in a package of its own.
    packages = [Path(path) / "nvidia" for path in sys.path]
    found = [str(lib) for path in packages if path.is_dir() for lib in sorted(path.glob(f"*/lib/{name}"))]
    for path in (name, *found):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise Unavailable(f"{name} was found neither by the loader nor beside PyTorch.")


def folder() -> Path:
    """Where machine code is kept: ``hfkvq/cuda`` in the user's cache folder.

    Raises:
        RuntimeError: there is no home to look in.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "hfkvq" / "cuda"


def _kept(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _keep(path: Path, code: bytes) -> None:
    # Another process may do the same: it sees no file or all of it.
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as made:
        new = Path(made) / path.name
        new.write_bytes(code)
        os.replace(new, path)


def compiled(source: str, architecture: str, defines: Mapping[str, int]) -> bytes:
    """Machine code of a source, from `folder` where it is there already.

    Args:
        source: in CUDA C++, without includes.
        architecture: e.g. ``"sm_90a"``.
        defines: macros.

    Raises:
        Unavailable: there is no NVRTC, or it does not compile this.
    """
    lib = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    text = "\0".join((source, f"{major.value}.{minor.value}", *options))
    path = None
    with contextlib.suppress(RuntimeError):
        path = folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.cubin"
    if path is not None and (kept := _kept(path)) is not None:
        return kept
    program = ctypes.c_void_p()
    _asked(lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = lib.nvrtcCompileProgram(program, len(options), given)
        size = ctypes.c_size_t()
        if failed:
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            raise Unavailable(f"NVRTC {major.value}.{minor.value} does not compile this: {log.value.decode()[:2000]}")
        _asked(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _asked(lib.nvrtcGetCUBIN(program, code))
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))
    if path is not None:
        # A second of the next process; nothing where the folder cannot be written.
        with contextlib.suppress(OSError):
            _keep(path, code.raw)
    return code.raw


def _asked(failed: int) -> None:
    if failed:
        raise Unavailable(f"NVRTC: error {failed}.")


class Kernel:
    """A function of a compiled source, loaded onto the current device.

    Args:
        code: from `compiled`.
        name: of the function, which is ``extern "C"``.
        threads: of a block.
        shared: bytes of shared memory of a block.

    Raises:
        Unavailable: the driver does not load it.
    """

    def __init__(self, code: bytes, name: str, threads: int, shared: int) -> None:
        self._lib, self._threads, self._shared = _driver(), threads, shared
        context = ctypes.c_void_p()
        self._check(self._lib.cuCtxGetCurrent(ctypes.byref(context)))
        if not context:
            # PyTorch's, which this thread has had nothing to do with yet.
            self._check(self._lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device()))
            self._check(self._lib.cuCtxSetCurrent(context))
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._lib.cuModuleLoadData(ctypes.byref(module), code))
        self._check(self._lib.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
        self._check(self._lib.cuFuncSetAttribute(self._function, SHARED, shared))
        self._attributes = {size: self._launched_with(size) for size in (1, 2, 4, 8)}

    @staticmethod
    def _launched_with(cluster: int) -> ctypes.Array[_Attribute]:
        return (_Attribute * 2)(_Attribute(SERIALIZED, 0, (1,)), _Attribute(CLUSTER, 0, (cluster, 1, 1)))

    def _check(self, failed: int, kind: type[RuntimeError] = Unavailable) -> None:
        if failed:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(failed, ctypes.byref(text))
            raise kind(f"the CUDA driver: {(text.value or b'error').decode()} ({failed}).")

    def _config(self, grid: tuple[int, int], stream: int, cluster: int) -> _Config:
        attributes = ctypes.cast(self._attributes[cluster], ctypes.POINTER(_Attribute))
        return _Config((*grid, 1), (self._threads, 1, 1), self._shared, stream, attributes, 2)

    def resident(self, cluster: int) -> int:
        """How many clusters of so many blocks run at a time on the current device, which is all of them there is.

        A cluster's blocks share a part of the GPU, and those parts have different numbers of multiprocessors.
        """
        count, config = ctypes.c_int(), self._config((cluster, 1), 0, cluster)
        # Those that start early are no different.
        config.attributes, config.count = ctypes.pointer(_Attribute(CLUSTER, 0, (cluster, 1, 1))), 1
        self._check(self._lib.cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, ctypes.byref(config)))
        return count.value

    def __call__(self, grid: tuple[int, int], cluster: int, stream: int, argument: ctypes.Structure) -> None:
        """Launches a grid of blocks with one argument, on a stream of the device, which is the current one.

        Args:
            grid: blocks; the first number is a multiple of `cluster`.
            cluster: blocks of a cluster: 1, 2, 4 or 8, next to each other in the grid's first direction.
            stream: the driver's.
            argument: of the kernel.

        Raises:
            RuntimeError: the driver does not launch it.
        """
        config = self._config(grid, stream, cluster)
        given = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        failed = self._lib.cuLaunchKernelEx(ctypes.byref(config), self._function, given, None)
        self._check(failed, RuntimeError)

    def capture_of(self, stream: int) -> int:
        """Number of the graph that a stream is captured into; 0 if it is not."""
        state, number = ctypes.c_int(), ctypes.c_ulonglong()
        found = (ctypes.byref(state), ctypes.byref(number), None, None, None)
        self._check(self._lib.cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *found), RuntimeError)
        return number.value if state.value == CAPTURING else 0
