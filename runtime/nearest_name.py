"""Messages about a name that isn't known."""

from collections.abc import Collection


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """The known name that looks most like `name`, if any does."""
    import difflib  # imported for a mistake only

    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def unknown_name(what: str, name: str, known: Collection[str]) -> str:
    """ "unknown WHAT 'max_seq': did you mean 'max_seqs'?", or with all known names if none is near."""
    near = nearest_name(name, known)
    hint = f": did you mean {near!r}?" if near else f", expected one of {', '.join(known)}"
    return f"unknown {what} {name!r}{hint}"
