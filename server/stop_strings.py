"""Stop strings: matched on text, across token boundaries."""

from collections.abc import Iterable, Mapping, Sequence

from castiron.runtime.errors import RequestError

MAX_STOP_STRINGS = 4  # as in OpenAI's API
MAX_STOP_CHARS = 1024


def checked_stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The request field `stop` as a tuple. Raises RequestError for too many, empty or overlong strings."""
    if stop is None:
        return ()
    if not isinstance(stop, str | Iterable) or isinstance(stop, bytes | Mapping):
        raise RequestError(f"stop is a {type(stop).__name__}, expected a string or several", "stop")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(string, str) for string in strings):
        raise RequestError("stop holds something other than strings, expected a string or several", "stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(strings)} strings, at most {MAX_STOP_STRINGS} are allowed", "stop")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARS:
            raise RequestError(
                f"a stop string has {len(string)} characters, expected 1 to {MAX_STOP_CHARS}", "stop"
            )
    return strings


class StopStringMatcher:
    """Passes text on, holding back what could be the beginning of a stop string.

    stop "END":  add("the E") -> "the "   add("N") -> ""   add("ough") -> "ENough"   add(" END") -> " ", found
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.found: str | None = None  # the stop string that was met

    def add(self, text: str) -> str:
        """The text that can be given now: without the stop string and all that follows it."""
        if not self._stop_strings:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        self._held = ""
        # the one complete first, so that it doesn't matter in which pieces the text comes
        matches = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop_strings if stop in text
        ]
        if matches:
            end, _, self.found = min(matches)
            return text[: end - len(self.found)]
        held = max(_overlap(text, stop) for stop in self._stop_strings)
        if held:
            self._held = text[-held:]
            return text[:-held]
        return text

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
