"""Chat templates for base models, which come without one, and which tokens of a conversation are the assistant's."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from experiments.checks import ConfigError
from experiments.config import ChatTemplate

Turns = list[dict[str, str]]
"""A conversation: role and content of each turn."""

TULU = (
    "{% if bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role: ' + message['role'] + ' is not allowed; use system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% if message['role'] != 'assistant' or not loop.last %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""The template of Tulu 3 (arXiv:2411.15124, allenai/Llama-3.1-Tulu-3-8B), with the assistant's tokens marked.

Roles are plain text: no token is new to the base model, so LoRA without embeddings has nothing to learn there.
"""
TEMPLATES = {ChatTemplate.tulu: TULU}


def dress(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, name: str) -> None:
    """Give the tokenizer of model ``name`` the template. Raises ConfigError if it is to use its own and has none."""
    if template in TEMPLATES:
        tokenizer.chat_template = TEMPLATES[template]
    elif tokenizer.chat_template is None:
        others = ", ".join(t.name for t in TEMPLATES)
        raise ConfigError(f"model.chat_template: 'own' is not allowed; {name} has no chat template, choose {others}")


def spans(tokenizer: PreTrainedTokenizerBase, turns: Turns) -> list[tuple[str, bool]]:
    """The conversation as pieces of text, each the assistant's words with their end of turn, or not (False).

    What the assistant is given is what it would be given to answer, so each piece can be tokenised apart, as it is
    when sampled. Raises ConfigError for a template from which the words cannot be told: it changes them, or
    earlier turns, or ends them with something else than the tokenizer's end token.
    """
    pieces: list[tuple[str, bool]] = []
    done = ""
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        head = _text(tokenizer, turns[:number], True)
        words = turn["content"] + str(tokenizer.eos_token)
        if not (head.startswith(done) and _text(tokenizer, turns[: number + 1], False).startswith(head + words)):
            raise ConfigError(
                "data.loss_on: 'assistant' is not allowed with this chat template, in which the assistant's words "
                "cannot be told from the rest; take model.chat_template=tulu or data.loss_on=last"
            )
        pieces += [(head[len(done) :], False), (words, True)]
        done = head + words
    return pieces


def _text(tokenizer: PreTrainedTokenizerBase, turns: Turns, answer: bool) -> str:
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=answer))
