"""How a run goes: where its sums are stored, whether it goes on from stored ones, and who is told how far it is."""

from dataclasses import KW_ONLY, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from massieu.errors import InputError
from massieu.foundation.arguments import described, flag, real
from massieu.foundation.doors import check_fields, path
from massieu.probing.session.course import STORE_EVERY, Course, course_for
from massieu.probing.session.progress import Progress, check_progress


@dataclass(frozen=True)
class Run:
    """How a probe runs. Where a run is asked for, its folder alone will do too.

    Args:
        folder: stores running sums, every ``store_every`` minutes and when Ctrl-C ends the reading, and the rows of
            ``per_token``; None stores nothing. With ``replace`` no sums are stored, since such a run begins at the beginning.
        resume: go on from what is stored in ``folder``, by a run of the same model, text and settings; the result is the one
            of a run without a break. Where nothing is stored, the reading begins at the beginning.
        store_every: minutes.
        distributed: the processes of the default group of ``torch.distributed`` share the text: each is given all of it,
            reads its batches and gets the result of all. Where a model is loaded by name, each loads its own.
        progress: True shows how far the run is where a person watches: a bar on a terminal, one line that is overwritten in a
            notebook, and nothing in a file or pipe. False shows nothing; a function is called with a `ProbeProgress` after
            every batch.

    Raises:
        InputError: ``resume`` without a folder; a time that is not positive.

    Example:
        >>> import massieu
        >>> massieu.Run("sums", resume=True)
        Run(folder='sums', resume=True, store_every=5.0, distributed=False)
    """

    folder: str | PathLike[str] | None = None
    _: KW_ONLY
    resume: bool = False
    store_every: float = STORE_EVERY
    distributed: bool = False
    progress: Progress = field(default=True, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, folder=path, resume=flag, store_every=real, distributed=flag, progress=check_progress)
        if self.resume and self.folder is None:
            raise InputError(
                "resume=True needs the folder in which running sums are stored: massieu.Run(folder, resume=True)"
            )
        if not self.store_every > 0:
            raise InputError(f"store_every must be a positive number of minutes, got {self.store_every}")


def course_of(run: Run, settings: dict[str, Any], stores: bool) -> Course | None:
    """The way of this process through the text; None where nothing is stored, and one process reads all.

    Args:
        settings: what has to be the same for stored sums to belong to this run.
        stores: False where nothing of it could be gone on from.

    Raises:
        InputError: as `course_for`.
    """
    folder = Path(run.folder) if stores and run.folder is not None else None
    if folder is None and not run.distributed:
        return None
    return course_for(run.distributed, folder, run.resume and stores, run.store_every, settings)


def given_run(run: Any) -> Run:
    """A run as a caller gives it: None, a folder or a `Run`.

    Raises:
        InputError: it is something else.
    """
    if isinstance(run, Run):
        return run
    if run is None or isinstance(run, str | PathLike):
        return Run(run)
    raise InputError(f"run must be a folder or a massieu.Run, got {described(run)}")
