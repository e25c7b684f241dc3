"""The C code of this package as a library: compiled once for each kind of processor, kept in the user's cache, then loaded.

A machine without a C compiler has no such library; whoever asks is told why, and works without it.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("row_sums.c")
COMPILERS = ("cc", "gcc", "clang")
"""Commands that are tried, after the one that the environment variable CC names."""
# No flag lets the compiler reorder sums or forget NaN. -O3 takes three times as long to compile and gains nothing here.
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
PROCESSOR_FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma"),
}
"""By what PyTorch's own kernels use on this processor; others get the compiler's default."""
SECONDS = 60
"""A compiler that takes longer is stopped."""


class NotCompiledError(Exception):
    """There is no library, for a reason."""


@functools.cache
def library() -> ctypes.CDLL | str:
    """The library, or a phrase that says why there is none."""
    try:
        return _loaded()
    except NotCompiledError as reason:
        return str(reason)
    except OSError as error:
        return f"its code could not be compiled here: {error}"


def _loaded() -> ctypes.CDLL:
    """The library of the cache, compiled where it is not there or cannot be loaded."""
    source = SOURCE.read_bytes()
    flags = (*FLAGS, *PROCESSOR_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ()))
    name = _name(source, flags)
    folder = _cache_folder()
    if folder is not None:
        # It may be missing, damaged, or where this user may not read.
        with suppress(OSError):
            return ctypes.CDLL(str(folder / name))
    with tempfile.TemporaryDirectory(prefix="massieu-") as passing:
        compiled = Path(passing) / name
        _compile(source, flags, compiled)
        if folder is not None:
            # First from the cache: nothing can be loaded from some systems' folder for passing files.
            with suppress(OSError):
                _keep(compiled, folder / name)
                return ctypes.CDLL(str(folder / name))
        return ctypes.CDLL(str(compiled))


def _name(source: bytes, flags: tuple[str, ...]) -> str:
    """A name that no other code, processor or system shares."""
    facts = "\0".join([*flags, platform.system(), platform.machine(), *platform.libc_ver()])
    digest = hashlib.sha256(source + facts.encode()).hexdigest()
    return f"row_sums-{digest[:24]}.so"


def _cache_folder() -> Path | None:
    """Where compiled code is kept, as the XDG base directory specification says; None for a user without a home."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # The specification: a relative path is to be ignored.
    if os.path.isabs(chosen):
        return Path(chosen) / "massieu"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "massieu" if os.path.isabs(home) else None


def _compile(source: bytes, flags: tuple[str, ...], into: Path) -> None:
    """Compile the code into a shared library.

    Raises:
        NotCompiledError: there is no compiler, or it fails.
    """
    candidates = (os.environ.get("CC", ""), *COMPILERS)
    compiler = next((found for command in candidates if command and (found := shutil.which(command))), None)
    if compiler is None:
        raise NotCompiledError(f"it needs a C compiler, and there is no {', '.join(COMPILERS)} here")
    code = into.with_suffix(".c")
    code.write_bytes(source)
    command = [compiler, *flags, "-o", str(into), str(code)]
    try:
        run = subprocess.run(command, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiledError(f"the C compiler {compiler} did not run: {error}") from error
    if run.returncode != 0:
        # A compiler writes in the user's language, and not always in Python's encoding.
        said = run.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise NotCompiledError(f"the C compiler {compiler} failed: {said[0]}")


def _keep(compiled: Path, kept: Path) -> None:
    """Copy the library into the cache, whole or not at all.

    Raises:
        OSError: the cache cannot be written.
    """
    kept.parent.mkdir(parents=True, exist_ok=True)
    descriptor, beside = tempfile.mkstemp(dir=kept.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(compiled.read_bytes())
        os.replace(beside, kept)
    except OSError:
        os.unlink(beside)
        raise
