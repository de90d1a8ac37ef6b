"""The text side of one answer: the prompt's token ids, and the text of the tokens that follow."""

from castiron.runtime.messages import RequestOutput
from castiron.server.generated_text import GeneratedText
from castiron.server.text_front import TextFront


class AnswerText:
    """A prompt's ids, then its answer's text. Making one loads the tokenizer, which takes a while."""

    def __init__(self, engine_path: str, prompt: str, raw: bool) -> None:
        """The prompt goes through the chat template if there is one, unless `raw`.

        Raises as TextFront.load does, RequestError for a prompt that can't be encoded.
        """
        front = TextFront.load(engine_path)
        self._tokenizer = front.tokenizer
        self._generated = GeneratedText(front.tokenizer)
        self._prompt_ids = (
            front.tokenizer.encode_prompt(prompt)
            if raw or not front.has_chat_template
            else front.prompter.encode([{"role": "user", "content": prompt}])
        )

    def prompt_ids(self) -> list[int]:
        """The prompt as token ids."""
        return self._prompt_ids

    def add(self, output: RequestOutput) -> str:
        """The text that the engine's next output completes (often "")."""
        return self._generated.add(output).text

    def token_texts(self, token_ids: list[int]) -> list[str]:
        """Each token alone as text."""
        return [self._tokenizer.token_text(token_id) for token_id in token_ids]

    def child_peak_bytes(self) -> int:
        """0: no other process has this."""
        return 0
