"""Tokenizers as the engine file carries them: tokenizer.json, a compact config, and the chat template."""

from castiron.builder.tokenizer.tokenizer_files import TokenizerFiles, build_tokenizer

__all__ = ["TokenizerFiles", "build_tokenizer"]
