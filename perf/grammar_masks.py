"""How long it takes to say what a grammar allows next: microseconds a row of a made-up vocabulary of 150,000 tokens.

    python -m castiron.perf.grammar_masks [--vocab 150000] [--rows 1,16,64] [--tokens 200] [--json FILE]

The tokenizer is byte-level BPE over random merges. Answers are random walks through a JSON schema, any JSON object and
a regex: each turn fills the masks of all rows at once, as a step does, and takes a random allowed token in each.
"""

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from castiron.perf.snapshot import take_snapshot, write_snapshot
from castiron.perf.timed_device import timed_manifest
from castiron.perf.timing import summarize
from castiron.runtime.command_line import OneLineParser, positive_int, positive_int_list, run_command
from castiron.runtime.grammar_compiler import Grammar, GrammarCompiler
from castiron.runtime.grammar_spec import GrammarSpec
from castiron.runtime.manifest import Profile
from castiron.runtime.output_file import check_output_file, output_file

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
        },
    },
    "required": ["name", "tags", "address"],
}
SPECS = {
    "schema": GrammarSpec("json_schema", json.dumps(SCHEMA)),
    "object": GrammarSpec("json_object"),
    "regex": GrammarSpec("regex", "([a-z]+[0-9]{2,5}[ ,.])*end"),
}
EOS_TOKEN_ID = 0


def made_up_tokenizer(vocab_size: int) -> bytes:
    """tokenizer.json of so many tokens: EOS, the bytes, and merges of earlier tokens, letters for the most part."""
    rng = np.random.default_rng(0)
    alphabet = sorted(ByteLevel.alphabet())
    words = ["<eos>", *alphabet]
    letters = [
        place for place, text in enumerate(words) if (text.isascii() and text.isalnum()) or text == "Ġ"
    ]
    known, merges = set(words), []
    while len(words) < vocab_size:
        pool = letters if rng.random() < 0.9 else range(1, len(words))
        left, right = (words[pool[int(rng.integers(len(pool)))]] for _ in range(2))
        if len(left + right) <= 12 and left + right not in known:
            if left.isascii() or left.startswith("Ġ"):
                letters.append(len(words))
            known.add(left + right)
            words.append(left + right)
            merges.append((left, right))
    tokenizer = Tokenizer(BPE({word: place for place, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer.to_str().encode()


def measure(vocab_size: int, rows: tuple[int, ...], num_tokens: int) -> dict[str, Any]:
    """{"tokenizer_s", "compile_ms": {spec: …}, "mask_us_a_row": {"schema.r16": {"p50", "p99"}, …}}."""
    data = made_up_tokenizer(vocab_size)
    compiler = GrammarCompiler(lambda: data, vocab_size, (EOS_TOKEN_ID,))
    start_s = time.perf_counter()
    compiler.compile(SPECS["regex"])
    metrics: dict[str, Any] = {
        "tokenizer_s": time.perf_counter() - start_s,
        "compile_ms": {},
        "mask_us_a_row": {},
    }
    for name, spec in SPECS.items():
        start_s = time.perf_counter()
        compiler.compile(spec)
        metrics["compile_ms"][name] = (time.perf_counter() - start_s) * 1e3
        for count in rows:
            times = _walk(compiler, spec, vocab_size, count, num_tokens)
            metrics["mask_us_a_row"][f"{name}.r{count}"] = summarize(times)
    compiler.close()
    return metrics


def _walk(
    compiler: GrammarCompiler, spec: GrammarSpec, vocab_size: int, count: int, num_tokens: int
) -> list[float]:
    rng = np.random.default_rng(1)
    grammars = [compiler.compile(spec) for _ in range(count)]
    masks = np.zeros((count, -(-vocab_size // 32)), np.uint32)
    times = []
    for _ in range(num_tokens):
        start_s = time.perf_counter()
        Grammar.fill_masks(grammars, masks)
        times.append((time.perf_counter() - start_s) * 1e6 / count)
        for place, mask in enumerate(masks):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            assert grammars[place].accept(int(rng.choice(allowed)))
            if grammars[place].has_ended:
                grammars[place] = compiler.compile(spec)
    return times


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="grammar_masks", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--vocab", type=positive_int, default=150_000, metavar="N", help="tokens (default 150000)")
    add("--rows", type=positive_int_list, default=(1, 16, 64), metavar="N,…", help="answers at once")
    add("--tokens", type=positive_int, default=200, metavar="N", help="of each answer (default 200)")
    add("--json", type=output_file, metavar="FILE", help="write a snapshot of the measurement")
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.json is not None:
        check_output_file(args.json, ".json")
    metrics = measure(args.vocab, tuple(args.rows), args.tokens)
    print(f"tokenizer {metrics['tokenizer_s']:.2f} s; compile, ms: {metrics['compile_ms']}")
    for case, us in metrics["mask_us_a_row"].items():
        print(f"{case:12} median {us['p50']:8.1f} us a row, p99 {us['p99']:8.1f}")
    if args.json is not None:
        snapshot = take_snapshot(timed_manifest(Profile(1, 1, 1)), ["grammar-masks", *sys.argv[1:]], metrics)
        write_snapshot(args.json, snapshot)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(_parser(), None, _run))
