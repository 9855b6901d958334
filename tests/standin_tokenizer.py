"""A stand-in for the tokenizer of Kimi-K2.5, built offline: remote Python code over tiktoken, no offsets, control
tokens far above the vocabulary (`<think>` is 163606, `</think>` 163607 as there, and not "special"), defaults of its
own in `apply_chat_template`, and a template without generation marks that shows reasoning only since the last user
message. For the tests of masks, regeneration, --trust-remote-code.
"""

import base64
import json
from pathlib import Path

CODE = '''
import base64
from pathlib import Path

import tiktoken
from transformers import PreTrainedTokenizer


class StandInTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kwargs):
        lines = [line.split() for line in Path(vocab_file).read_text().splitlines()]
        ranks = {base64.b64decode(piece): int(rank) for piece, rank in lines}
        self.encoding = tiktoken.Encoding("stand-in", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        self.names = {rank: piece.decode("latin-1") for piece, rank in ranks.items()}
        self.ranks = {name: rank for rank, name in self.names.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return 163840

    def get_vocab(self):
        return {**self.ranks, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        return [self.names[rank] for rank in self.encoding.encode(text)]

    def _convert_token_to_id(self, token):
        return self.ranks.get(token)

    def _convert_id_to_token(self, index):
        return self.names.get(index, f"<|reserved_token_{index}|>")

    def apply_chat_template(self, conversation, tools=None, tokenize=False, add_generation_prompt=True, **kwargs):
        """As there: text unless asked otherwise, a generation prompt unless told not to, keys of tools in order."""
        tools = tools and [dict(sorted(tool.items())) for tool in tools]
        return super().apply_chat_template(
            conversation, tools=tools, tokenize=tokenize, add_generation_prompt=add_generation_prompt, **kwargs
        )

    def convert_tokens_to_string(self, tokens):
        special = self.added_tokens_encoder
        return "".join(
            token if token in special else token.encode("latin-1").decode("utf-8", "replace") for token in tokens
        )


PATTERN = r" ?[A-Za-z]+| ?[0-9]+|[^A-Za-z0-9\\s]+|\\s+"
'''

SPECIAL = {
    163584: "[BOS]", 163585: "[EOS]", 163586: "<|im_end|>", 163587: "<|im_user|>", 163588: "<|im_assistant|>",
    163594: "<|im_system|>", 163595: "<|tool_calls_begin|>", 163596: "<|tool_calls_end|>", 163601: "<|im_middle|>",
    163606: "<think>", 163607: "</think>",
}  # fmt: skip

TEMPLATE = """
{%- set last_user = namespace(at=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last_user.at = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}<|im_system|>tools<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    <|im_assistant|>assistant<|im_middle|><think>
    {%- if loop.index0 > last_user.at and m.reasoning_content -%}{{ m.reasoning_content }}{%- endif -%}
    </think>{{ m.content }}
    {%- if m.tool_calls -%}<|tool_calls_begin|>
      {%- for call in m.tool_calls -%}{{ call.function.name }}({{ call.function.arguments | tojson }}){%- endfor -%}
    <|tool_calls_end|>{%- endif -%}
    <|im_end|>
  {%- elif m.role in ('user', 'system', 'tool') -%}
    <|im_{{ 'user' if m.role == 'user' else 'system' }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>
  {%- else -%}{{ raise_exception('this template has no role ' + m.role) }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|><think>
  {%- if thinking is defined and not thinking -%}</think>{%- endif -%}{%- endif -%}
"""

CORPUS = "the rain in Spain stays mainly in the plain; you are a helpful assistant; what is the weather? " * 4


def build(folder: Path, template: str = TEMPLATE, marker: Path | None = None) -> Path:
    """Writes the tokenizer to `folder`; load it with trust_remote_code. Its code writes to `marker` when it runs."""
    from tiktoken._educational import bpe_train

    folder.mkdir(parents=True, exist_ok=True)
    ranks = bpe_train(CORPUS, vocab_size=300, pat_str=r" ?[A-Za-z]+|[^A-Za-z]+", visualise=None)
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    mark = f"open({str(marker)!r}, 'a').write('tokenizer\\n')\n" if marker else ""
    (folder / "tokenization_standin.py").write_text(CODE + mark)
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 163840}')
    added = {str(i): {"content": text, "special": "think>" not in text} for i, text in SPECIAL.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "StandInTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
        "auto_map": {"AutoTokenizer": ["tokenization_standin.StandInTokenizer", None]},
        "added_tokens_decoder": added, "chat_template": template,
    }))  # fmt: skip
    return folder
