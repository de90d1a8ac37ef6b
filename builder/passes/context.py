"""What a pass may know besides the program, and where it says what it left undone."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class PassContext:
    """Options of one run of the pipeline."""

    compute: str  # "f32", "bf16" or "int8"
    notes: Counter[str] = field(default_factory=Counter)  # why something wasn't done -> how often

    def note(self, text: str) -> None:
        """Put a reason into the report; equal ones are counted."""
        self.notes[text] += 1
