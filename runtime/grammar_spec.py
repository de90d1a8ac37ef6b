"""What an answer must look like, as a request says it; compiled by grammar_compiler.py."""

from typing import Literal

import msgspec

from castiron.runtime.errors import RequestError

MAX_GRAMMAR_CHARS = 1 << 18
MAX_CHOICES = 1024
MAX_TAGS = 128

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf", "structural_tag"]


class StructuralTag(msgspec.Struct, frozen=True):
    """Text that begins with `trigger` is the tag: `begin`, JSON of `schema`, `end`."""

    trigger: str
    begin: str
    schema: str  # JSON
    end: str


class GrammarSpec(msgspec.Struct, frozen=True):
    """json_schema: `text` is the schema; json_object: any object; regex, lark, gbnf: `text`; choice: one of `choices`;
    structural_tag: free text, in which every `tags` trigger begins its tag.
    """

    kind: Kind
    text: str = ""
    choices: tuple[str, ...] = ()
    tags: tuple[StructuralTag, ...] = ()
    any_whitespace: bool = True  # of JSON between its tokens

    def validate(self) -> None:
        """Raise RequestError for what is too large or empty; the grammar itself is not looked at."""
        param = "structured_outputs"
        size = len(self.text) + sum(map(len, self.choices))
        size += sum(len(t.trigger) + len(t.begin) + len(t.schema) + len(t.end) for t in self.tags)
        if size > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"the grammar has {size} characters, at most {MAX_GRAMMAR_CHARS} are allowed", param
            )
        if self.kind == "choice" and not (1 <= len(self.choices) <= MAX_CHOICES and all(self.choices)):
            raise RequestError(
                f"`choice` has {len(self.choices)} texts, expected 1 to {MAX_CHOICES}, none of them empty",
                param,
            )
        if self.kind == "structural_tag":
            if not 1 <= len(self.tags) <= MAX_TAGS:
                raise RequestError(
                    f"there are {len(self.tags)} structural tags, expected 1 to {MAX_TAGS}", param
                )
            for tag in self.tags:
                if not tag.trigger or not tag.begin.startswith(tag.trigger):
                    raise RequestError(
                        f"the structural tag {tag.begin!r:.60} doesn't begin with its trigger {tag.trigger!r:.40}",
                        param,
                    )
        if self.kind in ("json_schema", "regex", "lark", "gbnf") and not self.text:
            raise RequestError(f"the {self.kind} is empty", param)
