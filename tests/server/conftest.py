"""A tiny engine that can chat, and a scripted one behind a real HTTP server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import build
from http_requests import HELLO
from scripted_engine import ScriptedClient, http_server
from small_tokenizers import CHATML


@pytest.fixture(scope="session")
def tiny_chat_engine(tmp_path_factory: pytest.TempPathFactory, engines_folder: Path) -> Path:
    """float32; a byte a token, <|end|> (256) and <|start|> (257), and a ChatML template over those two."""
    from tiny_checkpoints import save_tiny_checkpoint

    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("tiny-chat") / "tiny-chat", seed=1)
    template = CHATML.replace("<|im_start|>", "<|start|>").replace("<|im_end|>", "<|end|>")
    (folder / "chat_template.jinja").write_text(template)
    return build(folder, engines_folder / "tiny-chat.engine", "--quantize", "none")


@pytest.fixture(scope="module")
def engine() -> ScriptedClient:
    """Answers every request with HELLO."""
    return ScriptedClient(HELLO)


@pytest.fixture(scope="module")
def url(engine: ScriptedClient) -> Iterator[str]:
    """The base URL of a server over `engine`."""
    with http_server(engine) as base:
        yield base
