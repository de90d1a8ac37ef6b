"""Runs sequences through a forward program as a scheduler would: chunks, ragged batches, scattered cache
blocks.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from castiron.builder.checkpoint import open_checkpoint
from castiron.builder.checkpoint.parameter_data import load_parameter
from castiron.builder.graph import Program
from castiron.builder.interpreter import run
from castiron.builder.model_parameters import BoundModel, bind_model
from castiron.builder.parameters import Parameter
from castiron.builder.trace import TraceOptions, trace_forward

BLOCK_SIZE = 16
TABLE_WIDTH = 24  # 384 tokens
Loader = Callable[[Parameter], torch.Tensor]


def trace_checkpoint(path: Path) -> tuple[Program, BoundModel, Loader]:
    """A checkpoint's stage-0 program, its model, and a function that loads (and keeps) parameters."""
    checkpoint = open_checkpoint(str(path))
    model = bind_model(checkpoint)
    program = trace_forward(
        model.family, model.config, model.parameters, TraceOptions(BLOCK_SIZE, TABLE_WIDTH, "f32")
    )
    kept: dict[Parameter, torch.Tensor] = {}

    def load(parameter: Parameter) -> torch.Tensor:
        if parameter not in kept:
            kept[parameter] = load_parameter(checkpoint, parameter)
        return kept[parameter]

    return program, model, load


class PagedRun:
    """The caches of some sequences, and steps over them. Blocks are handed out in a scattered order."""

    def __init__(self, program: Program, load: Loader, sequences: Sequence[Sequence[int]]) -> None:
        self.program, self._load, self.sequences = program, load, sequences
        needed = sum(-(-len(sequence) // BLOCK_SIZE) for sequence in sequences) + 3
        order = [(7 * i + 3) % needed for i in range(needed)] if needed % 7 else list(range(needed))
        self.tables = torch.full((len(sequences), TABLE_WIDTH), -1, dtype=torch.int32)
        for i, sequence in enumerate(sequences):
            for block in range(-(-len(sequence) // BLOCK_SIZE)):
                self.tables[i, block] = order.pop()
        self.done = [0] * len(sequences)
        self.logits: list[list[torch.Tensor]] = [[] for _ in sequences]
        # garbage in unwritten slots must never reach a result
        self.caches = {
            s.name: torch.full((needed, *(d for d in s.shape[1:] if isinstance(d, int))), 1e4)
            for s in program.states
        }

    def step(self, counts: Sequence[int], logit_stride: int = 1) -> dict[str, torch.Tensor]:
        """Run the next counts[i] tokens of each sequence (0 = leave it out);

        wants every stride-th row's logits.
        """
        inputs = self.inputs(counts, logit_stride)
        outputs = run(self.program, inputs, self._load)
        for state in self.program.states:
            self.caches[state.name] = outputs[state.output]
        row = 0
        position = 0
        for i, count in enumerate(counts):
            for token in range(count):
                if (position + token) % logit_stride == 0:
                    self.logits[i].append(outputs["logits"][row])
                    row += 1
            position += count
            self.done[i] += count
        return outputs

    def inputs(self, counts: Sequence[int], logit_stride: int = 1) -> dict[str, torch.Tensor]:
        """The step's graph inputs."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        live = [i for i, count in enumerate(counts) if count]
        for i in live:
            for position in range(self.done[i], self.done[i] + counts[i]):
                token_ids.append(self.sequences[i][position])
                positions.append(position)
                slots.append(int(self.tables[i, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE)
        starts = torch.tensor([0, *(counts[i] for i in live)]).cumsum(0)
        return {
            "token_ids": torch.tensor(token_ids, dtype=torch.int32),
            "positions": torch.tensor(positions, dtype=torch.int32),
            "query_starts": starts.int(),
            "seq_lens": torch.tensor([self.done[i] + counts[i] for i in live], dtype=torch.int32),
            "logit_rows": torch.arange(0, len(token_ids), logit_stride, dtype=torch.int32),
            "slot_mapping.kv": torch.tensor(slots, dtype=torch.int64),
            "block_tables.kv": self.tables[live],
            "last_token": torch.zeros(5, dtype=torch.int32),
            **self.caches,
        }

    def all_logits(self, index: int) -> torch.Tensor:
        """Logits of sequence `index` so far: f32 [tokens, vocab]."""
        return torch.stack(self.logits[index])


def run_in_chunks(
    program: Program, load: Loader, sequences: Sequence[Sequence[int]], chunk: int
) -> list[torch.Tensor]:
    """Logits of every token of every sequence, at most `chunk` tokens of a sequence a step, all side by
    side.
    """
    paged = PagedRun(program, load, sequences)
    while any(done < len(s) for done, s in zip(paged.done, sequences, strict=True)):
        paged.step([min(chunk, len(s) - done) for done, s in zip(paged.done, sequences, strict=True)])
    return [paged.all_logits(i) for i in range(len(sequences))]


def make_tokens(length: int, vocab_size: int = 307, seed: int = 0) -> list[int]:
    """Pseudo-random token ids."""
    generator = torch.Generator().manual_seed(seed + 1000 * length)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()
