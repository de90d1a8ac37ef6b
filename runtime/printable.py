"""Texts from a file that may be hostile, made fit for a one-line message."""


def printable(text: str, limit: int = 80) -> str:
    """At most `limit` characters of the text, those that aren't plain ASCII shown as escapes."""
    return ascii(text)[1:-1][:limit]


def one_line(text: str) -> str:
    """The text with control characters and line breaks shown as escapes."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
