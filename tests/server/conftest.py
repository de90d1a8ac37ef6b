"""A tiny engine that can chat: the tiny Llama with a chat template."""

import subprocess
import sys
from pathlib import Path

import pytest
from small_tokenizers import CHATML


@pytest.fixture(scope="session")
def tiny_chat_engine(tmp_path_factory: pytest.TempPathFactory, engines_folder: Path) -> Path:
    """float32; a byte a token, <|end|> (256) and <|start|> (257), and a ChatML template over those two."""
    from tiny_checkpoints import save_tiny_checkpoint

    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("tiny-chat") / "tiny-chat", seed=1)
    template = CHATML.replace("<|im_start|>", "<|start|>").replace("<|im_end|>", "<|end|>")
    (folder / "chat_template.jinja").write_text(template)
    engine = engines_folder / "tiny-chat.engine"
    command = [sys.executable, "-m", "castiron.builder.cli", str(folder), "-o", str(engine)]
    done = subprocess.run([*command, "--quantize", "none"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return engine
