"""AnswerText in a forked process, so that the tokenizer is loaded while this process loads the engine.

Python code of two threads takes turns, that of two processes doesn't. A fork begins with all that is imported
already, and pages are shared until one of the two writes to them.
"""

import os
import pickle
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

from castiron.runtime.errors import CastironError, WorkFailedError
from castiron.runtime.messages import RequestOutput
from castiron.runtime.peak_memory import peak_memory_bytes


def can_fork() -> bool:
    """Whether a fork of this process is safe: on Linux, while it has one thread."""
    try:
        return sys.platform == "linux" and len(list(Path("/proc/self/task").iterdir())) == 1
    except OSError:
        return False


class TextProcess:
    """The methods of AnswerText, answered by a child process. A context manager that ends the child.

    Each raises what the child's AnswerText raised, and WorkFailedError if the child died.
    """

    def __init__(self, engine_path: str, prompt: str, raw: bool) -> None:
        """Fork; the child begins to load. Raises OSError if there can't be another process."""
        child_in, our_out = os.pipe()
        our_in, child_out = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(our_out)  # or the child would never see the end of its input
            os.close(our_in)
            _run_child(engine_path, prompt, raw, os.fdopen(child_in, "rb"), os.fdopen(child_out, "wb"))
        os.close(child_in)
        os.close(child_out)
        self._requests: BinaryIO = os.fdopen(our_out, "wb", buffering=0)
        self._replies: BinaryIO = os.fdopen(our_in, "rb")

    def __enter__(self) -> "TextProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prompt_ids(self) -> list[int]:
        """The prompt as token ids; waits until the child has loaded."""
        ids: list[int] = self._call("prompt_ids")
        return ids

    def add(self, output: RequestOutput) -> str:
        """The text that the engine's next output completes (often "")."""
        return str(self._call("add", output))

    def token_texts(self, token_ids: list[int]) -> list[str]:
        """Each token alone as text."""
        texts: list[str] = self._call("token_texts", token_ids)
        return texts

    def child_peak_bytes(self) -> int:
        """Most resident memory the child has had; pages it shares with this process count."""
        return int(self._call("peak_memory_bytes"))

    def close(self) -> None:
        """End the child: it has nothing to lose. Calling it twice is fine."""
        self._requests.close()
        self._replies.close()
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._wait()

    def _call(self, method: str, *args: object) -> Any:
        assert self._pid, "the child has ended"
        try:
            self._requests.write(pickle.dumps((method, args)))
            error, result = pickle.load(self._replies)
        except (OSError, EOFError) as failure:
            ended = f"exit code {code}" if (code := self._wait()) >= 0 else f"signal {-code}"
            raise WorkFailedError(f"the tokenizer's process was ended by {ended}") from failure
        if error is not None:
            raise error
        return result

    def _wait(self) -> int:
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)


def _run_child(engine_path: str, prompt: str, raw: bool, requests: BinaryIO, replies: BinaryIO) -> NoReturn:
    """Load, then answer calls until their pipe is closed. Nothing of the parent's code runs here afterwards."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches both: the parent decides
        methods: dict[str, Any] = {"peak_memory_bytes": peak_memory_bytes}
        failure = None
        try:
            from castiron.server.answer_text import AnswerText

            text = AnswerText(engine_path, prompt, raw)
            methods |= {"prompt_ids": text.prompt_ids, "add": text.add, "token_texts": text.token_texts}
        except BaseException as error:  # the parent raises it
            failure = error
        while True:
            method, args = pickle.load(requests)
            result = None
            if failure is None:
                try:
                    result = methods[method](*args)
                except BaseException as error:
                    failure = error
            replies.write(_encode(failure, result))
            replies.flush()
    except (EOFError, OSError):  # the parent is gone
        pass
    finally:
        os._exit(0)


def _encode(error: BaseException | None, result: object) -> bytes:
    """A reply. An error of ours travels as it is, any other with its traceback, as this is where it is seen."""
    if error is not None and not isinstance(error, CastironError | MemoryError):
        import traceback  # seldom needed, and not soon

        error.add_note("".join(traceback.format_exception(error)))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an exception of another library may not travel
            error = WorkFailedError(f"{type(error).__name__}: {error}")
    return pickle.dumps((error, result))
