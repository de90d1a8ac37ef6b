"""A Hugging Face folder's tokenizer is taken as it is; its settings are read where transformers does."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import save_tiny_checkpoint
from tokenizers import Tokenizer, processors

from castiron.builder.checkpoint import open_checkpoint
from castiron.builder.tokenizer import TokenizerFiles, build_tokenizer
from castiron.runtime.errors import CheckpointError

END, START = 256, 257


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny", num_layers=1)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "tiny")


def build(folder: Path) -> TokenizerFiles:
    with open_checkpoint(folder) as checkpoint:
        return build_tokenizer(checkpoint)


def settings(files: TokenizerFiles) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(files.members["tokenizer/tokenizer_config.json"])
    return result


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({k: v for k, v in (content | changes).items() if v is not ...}))


def test_tokenizer_json_is_carried_byte_for_byte(folder: Path) -> None:
    files = build(folder)
    assert files.members["tokenizer/tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert (files.vocab_size, files.bos_token_id, files.eos_token_ids) == (258, START, (END,))
    config = settings(files)
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == (
        "<|start|>",
        "<|end|>",
        False,
    )
    assert "tokenizer/chat_template.jinja" not in files.members


def test_eos_ids_come_from_the_generation_config_then_the_config_then_the_tokenizer(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[3, END, 3])
    edit(folder / "config.json", eos_token_id=5)
    assert build(folder).eos_token_ids == (3, END)
    edit(folder / "generation_config.json", eos_token_id=...)
    assert build(folder).eos_token_ids == (5,)
    edit(folder / "config.json", eos_token_id=None)
    assert build(folder).eos_token_ids == (END,)


@pytest.mark.parametrize("eos", [-1, 307, True, "2", [1, None]])
def test_eos_ids_outside_the_vocabulary_are_refused(folder: Path, eos: Any) -> None:
    edit(folder / "generation_config.json", eos_token_id=eos)
    with pytest.raises(CheckpointError, match=r"eos_token_id is .*, expected token ids below 307"):
        build(folder)


def test_bos_is_added_when_the_post_processor_adds_it(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", START)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    assert settings(build(folder))["add_bos_token"] is True
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|end|>", special_tokens=[("<|start|>", START), ("<|end|>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    assert settings(build(folder))["add_eos_token"] is True
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> <|start|> $A", special_tokens=[("<|start|>", START), ("<|end|>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="surrounds a prompt with tokens other than BOS and EOS"):
        build(folder)


def test_a_model_without_bos_says_so(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", bos_token=None)
    assert build(folder).bos_token_id is None
    edit(folder / "tokenizer_config.json", bos_token={"content": "<|start|>", "special": True})
    assert build(folder).bos_token_id == START


def test_chat_template_file_goes_before_the_one_in_the_settings(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template="from settings")
    assert build(folder).members["tokenizer/chat_template.jinja"] == b"from settings"
    (folder / "chat_template.jinja").write_text("from file é", encoding="utf-8")
    assert build(folder).members["tokenizer/chat_template.jinja"].decode() == "from file é"


def test_of_several_chat_templates_the_default_is_taken(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit(folder / "tokenizer_config.json", chat_template=templates)
    assert build(folder).members["tokenizer/chat_template.jinja"] == b"D"


def test_sampling_defaults_count_only_if_the_model_asks_to_sample(folder: Path) -> None:
    wishes = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    edit(folder / "generation_config.json", **wishes)
    assert build(folder).generation_defaults == {}
    edit(folder / "generation_config.json", do_sample=True)
    assert build(folder).generation_defaults == wishes
    edit(folder / "generation_config.json", temperature="hot")
    with pytest.raises(CheckpointError, match="temperature is 'hot', expected a number"):
        build(folder)


def test_length_limit_is_a_number_or_none(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", model_max_length=2048)
    assert settings(build(folder))["model_max_length"] == 2048
    edit(folder / "tokenizer_config.json", model_max_length=int(1e30))
    assert settings(build(folder))["model_max_length"] is None


def test_a_named_token_the_tokenizer_lacks_is_refused(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", pad_token="<pad>")  # tolerated: never used
    assert settings(build(folder))["pad_token_id"] is None
    edit(folder / "tokenizer_config.json", eos_token="<gone>")
    with pytest.raises(CheckpointError, match="eos_token is '<gone>', which isn't a token"):
        build(folder)


@pytest.mark.parametrize("template", [3, {"a": "b"}, "\ud800"])
def test_a_chat_template_that_is_no_text_is_refused(folder: Path, template: Any) -> None:
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(CheckpointError, match="chat_template is neither text nor"):
        build(folder)


def test_a_panic_of_the_library_is_a_checkpoint_error(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<gone>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="not a tokenizer this library reads"):
        build(folder)


def test_missing_or_damaged_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"type": "None"}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer") as caught:
        build(folder)
    assert "\n" not in str(caught.value)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        build(folder)
