"""Golden masks: every expected mask here is written out by hand, piece by piece, and the code is broken once on purpose
to see that the comparison notices."""

import pytest

from common import embedded_model, loss_mask
from common.errors import UserError
from common.loss_mask import NO_PROMPT, REWRITTEN, supervise
from common.tokenizing import load_tokenizer
from standin_tokenizer import build

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
ASSISTANT = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(str(embedded_model.ensure()))


@pytest.fixture
def templated(smollm2):
    """SmolLM2's tokenizer with another template for one test."""
    before = smollm2.chat_template

    def with_template(template):
        smollm2.chat_template = template
        return smollm2

    yield with_template
    smollm2.chat_template = before


def u(text):
    return {"role": "user", "content": text}


def a(text, **more):
    return {"role": "assistant", "content": text, **more}


def check(tokenizer, result, pieces):
    """`pieces`: (text, supervised 0/1), in order; their tokens are the sample."""
    ids, mask, _ = result
    expected_ids, expected_mask = [], []
    for text, supervised in pieces:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected_ids += tokens
        expected_mask += [supervised] * len(tokens)
    assert ids == expected_ids
    assert mask == expected_mask


CHATML = [u("Hi"), a("Hello!"), u("2+2?"), a("4\n")]
CHATML_PIECES = [
    (SYSTEM + "<|im_start|>user\nHi<|im_end|>\n" + ASSISTANT, 0),
    ("Hello!<|im_end|>", 1),
    ("\n<|im_start|>user\n2+2?<|im_end|>\n" + ASSISTANT, 0),
    ("4\n<|im_end|>", 1),  # the newline of the answer is the model's, the one after the end of turn is the template's
    ("\n", 0),
]


def test_chatml_by_ids(smollm2):
    ids, mask, left_out = supervise(smollm2, [u("Hi"), a("Hello!")], "x")
    # <|im_start|> user \n Hi <|im_end|> \n <|im_start|> ass istant \n Hello ! <|im_end|> \n
    assert ids[21:] == [1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198, 19556, 17, 2, 198]
    assert mask == [0] * 21 + [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0]
    assert left_out == {}


def test_chatml_supervises_every_turn_or_the_last(smollm2):
    check(smollm2, supervise(smollm2, CHATML, "x"), CHATML_PIECES)
    last = [(text, supervised and i == 3) for i, (text, supervised) in enumerate(CHATML_PIECES)]
    check(smollm2, supervise(smollm2, CHATML, "x", which="last"), last)


@pytest.mark.parametrize("broken", ["shifted", "newline", "all", "none"])
def test_a_wrong_mask_does_not_pass(smollm2, monkeypatch, broken):
    if broken == "newline":
        monkeypatch.setattr(loss_mask, "turn_end", lambda tokenizer, ids, start, end: end)
    ids, mask, left_out = supervise(smollm2, CHATML, "x")
    mask = {"shifted": [0, *mask[:-1]], "newline": mask, "all": [1] * len(ids), "none": [0] * len(ids)}[broken]
    with pytest.raises(AssertionError):
        check(smollm2, (ids, mask, left_out), CHATML_PIECES)


def test_an_opening_assistant_turn_has_no_prompt(smollm2):
    messages = [a("Welcome"), u("Hi"), a("Yes?")]
    ids, mask, left_out = supervise(smollm2, messages, "x")
    assert left_out == {NO_PROMPT: 1}
    assert smollm2.decode([token for token, on in zip(ids, mask, strict=True) if on]) == "Yes?<|im_end|>"


# The stand-in for Kimi: a Python tokenizer, <think> 163606, </think> 163607, no marks.


def test_standin_multi_turn_with_system_and_tools(standin):
    call = {"function": {"name": "weather", "arguments": {"at": "Paris"}}}
    messages = [
        {"role": "system", "content": "Be brief."}, u("rain?"),
        a("", reasoning_content="ask", tool_calls=[call]), {"role": "tool", "content": "dry é"},
        a("no rain", reasoning_content="dry"),
    ]  # fmt: skip
    pieces = [
        ('<|im_system|>tools<|im_middle|>[{"name": "weather"}]<|im_end|>', 0),
        ("<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>rain?<|im_end|>", 0),
        ("<|im_assistant|>assistant<|im_middle|><think>", 0),
        ('ask</think><|tool_calls_begin|>weather({"at": "Paris"})<|tool_calls_end|><|im_end|>', 1),
        ("<|im_system|>tool<|im_middle|>dry é<|im_end|><|im_assistant|>assistant<|im_middle|><think>", 0),
        ("dry</think>no rain<|im_end|>", 1),
    ]
    result = supervise(standin, messages, "x", tools=[{"name": "weather"}])
    check(standin, result, pieces)
    ids, mask, left_out = result
    assert left_out == {} and not standin.is_fast
    thinks = [(token, on) for token, on in zip(ids, mask, strict=True) if token in (163606, 163607)]
    assert thinks == [(163606, 0), (163607, 1), (163606, 0), (163607, 1)]


def test_standin_agent_over_several_rounds(standin):
    """Two calls in a row, their results, an answer, and a second question: what the model said is supervised, but not
    the turn whose reasoning is no longer shown, nor the answer that saw it; the model's </think> counts everywhere."""
    call = {"function": {"name": "weather", "arguments": {"at": "Paris"}}}
    tool = {"role": "tool", "content": "dry"}
    messages = [
        {"role": "system", "content": "Be brief."}, u("rain?"), a("", tool_calls=[call]), tool,
        a("hm", reasoning_content="twice", tool_calls=[call]), tool, tool, a("no"), u("why?"),
        a("plain <think>the</think> rain", reasoning_content="because"),
    ]  # fmt: skip
    turn, asked = "<|im_assistant|>assistant<|im_middle|><think>", "<|im_user|>user<|im_middle|>"
    weather = '<|tool_calls_begin|>weather({"at": "Paris"})<|tool_calls_end|><|im_end|>'
    result = "<|im_system|>tool<|im_middle|>dry<|im_end|>"
    pieces = [
        (f"<|im_system|>system<|im_middle|>Be brief.<|im_end|>{asked}rain?<|im_end|>{turn}", 0),
        (f"</think>{weather}", 1), (f"{result}{turn}", 0),
        (f"</think>hm{weather}", 0),  # it said "twice</think>hm"
        (f"{result}{result}{turn}</think>no<|im_end|>", 0), (f"{asked}why?<|im_end|>{turn}", 0),
        ("because</think>plain <think>the</think> rain<|im_end|>", 1),
    ]  # fmt: skip
    found = supervise(standin, messages, "x")
    check(standin, found, pieces)
    assert found[2] == {REWRITTEN: 2}
    supervised = [token for token, on in zip(*found[:2], strict=True) if on]
    assert (supervised.count(163606), supervised.count(163607)) == (1, 3)
    assert not loss_mask.has_marks(standin)
    last = supervise(standin, messages, "x", which="last")
    check(standin, last, [(text, int(i == len(pieces) - 1)) for i, (text, _) in enumerate(pieces)])


def test_standin_without_thinking(standin):
    """`thinking=False` moves `</think>` into the prompt, so it is no longer the model's."""
    pieces = [
        ("<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>", 0),
        ("Hello<|im_end|>", 1),
    ]
    check(standin, supervise(standin, [u("Hi"), a("Hello")], "x", template_kwargs={"thinking": False}), pieces)


def test_reasoning_that_later_turns_do_not_show_is_not_supervised(standin):
    """The model said "hm</think>yes"; the second turn's prompt shows "</think>yes": nobody produced that."""
    messages = [u("Hi"), a("yes", reasoning_content="hm"), u("So?"), a("no", reasoning_content="so")]
    result = supervise(standin, messages, "x")
    assert result[2] == {REWRITTEN: 1}
    pieces = [
        ("<|im_user|>user<|im_middle|>Hi<|im_end|>", 0),
        ("<|im_assistant|>assistant<|im_middle|><think></think>yes<|im_end|>", 0),
        ("<|im_user|>user<|im_middle|>So?<|im_end|><|im_assistant|>assistant<|im_middle|><think>", 0),
        ("so</think>no<|im_end|>", 1),
    ]
    check(standin, result, pieces)


# Like Qwen3's: only the last answer shows its reasoning, and shows an empty one where there is none.
THINKING_CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.last -%}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif -%}"
    "{{ m.content + '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
    "{%- endif -%}"
)


def test_templates_that_think_in_the_last_turn_only(templated):
    tokenizer = templated(THINKING_CHATML)
    messages = [u("Hi"), a("yes"), u("So?"), a("no", reasoning_content="so")]
    pieces = [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n", 0),
        ("<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n", 0),
        ("<think>\nso\n</think>\n\nno<|im_end|>", 1),
        ("\n", 0),
    ]
    result = supervise(tokenizer, messages, "x")
    check(tokenizer, result, pieces)
    assert result[2] == {REWRITTEN: 1}
    with pytest.raises(UserError, match="^chats.jsonl:7, message 3: the prompt .* is not a prefix"):
        supervise(tokenizer, messages, "chats.jsonl:7", template_kwargs={"enable_thinking": False})


def test_tokens_that_merge_over_the_boundary_are_an_error(templated):
    """The prompt ends with a space, which becomes part of the first word of the answer."""
    tokenizer = templated(
        "{%- for m in messages -%}{{ m.role + ': ' + m.content + '<|im_end|>' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"
    )
    with pytest.raises(UserError, match="^chats.jsonl:3: the tokens before 'Hello.*change with what follows"):
        supervise(tokenizer, [u("Hi"), a("Hello")], "chats.jsonl:3")


MARKED = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' -%}{% generation %}INSIDE{% endgeneration %}AFTER"
    "{%- else -%}{{ m.content + '<|im_end|>\\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
MARKED_PIECES = [
    ("<|im_start|>user\nHi<|im_end|>\n" + ASSISTANT, 0), ("Hello!<|im_end|>", 1),
    ("\n<|im_start|>user\nSo?<|im_end|>\n" + ASSISTANT, 0), ("Yes<|im_end|>", 1), ("\n", 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("inside", "after"),
    [
        ("{{ m.content + '<|im_end|>' }}", "{{ '\\n' }}"),
        ("{{ m.content }}", "{{ '<|im_end|>\\n' }}"),  # a mark that forgets the end of turn
        ("{{ m.content + '<|im_end|>\\n' }}", ""),  # a mark that takes the template's newline for the model's
    ],
)
def test_generation_marks(templated, inside, after):
    tokenizer = templated(MARKED.replace("INSIDE", inside).replace("AFTER", after))
    messages = [u("Hi"), a("Hello!"), u("So?"), a("Yes")]
    assert loss_mask.has_marks(tokenizer)
    check(tokenizer, supervise(tokenizer, messages, "x"), MARKED_PIECES)
    last = [(text, supervised and i == 3) for i, (text, supervised) in enumerate(MARKED_PIECES)]
    check(tokenizer, supervise(tokenizer, messages, "x", which="last"), last)


def test_generation_marks_say_more_than_prefixes_could(templated):
    """Only the part that the author marked counts, which proves that the marks, not the prefixes, were used."""
    inside = "{{ m.content }}{% endgeneration %}{{ ' (sic)' }}{% generation %}{{ '<|im_end|>' }}"
    tokenizer = templated(MARKED.replace("INSIDE", inside).replace("AFTER", ""))
    pieces = [MARKED_PIECES[0], ("Hello!", 1), (" (sic)", 0), ("<|im_end|>", 1)]
    check(tokenizer, supervise(tokenizer, [u("Hi"), a("Hello!")], "x"), pieces)


def test_generation_marks_with_a_python_tokenizer(tmp_path):
    template = (
        "{%- for m in messages -%}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
        "{%- if m.role == 'assistant' -%}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{%- else -%}{{ m.content }}<|im_end|>{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
    )
    tokenizer = load_tokenizer(str(build(tmp_path, template)), trust_remote_code=True)
    pieces = [
        ("<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>", 0),
        ("rain<|im_end|>", 1),
    ]
    check(tokenizer, supervise(tokenizer, [u("Hi"), a("rain")], "x"), pieces)


def test_a_tokenizer_that_marks_the_start_of_every_text():
    """SentencePiece-like: "▁" before every text, so pieces do not add up, but prefixes still are prefixes."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers
    from transformers import PreTrainedTokenizerFast

    vocab = {piece: i for i, piece in enumerate(["<unk>", "</s>", "▁", "h", "i", "o", "k", "[", "]"])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.normalizer = normalizers.Prepend("▁")
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{%- for m in messages -%}{%- if m.role == 'user' -%}[{{ m.content }}]{%- else -%}{{ m.content }}</s>"
        "{%- endif -%}{%- endfor -%}"
    )
    ids, mask, _ = supervise(tokenizer, [u("hi"), a("ok")], "x")
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁", "[", "h", "i", "]", "o", "k", "</s>"]
    assert mask == [0, 0, 0, 0, 0, 1, 1, 1]


def test_a_template_that_raises_is_quoted(standin, smollm2):
    with pytest.raises(UserError, match=r"^c\.jsonl:5: the chat template refuses .*has no role developer"):
        supervise(standin, [{"role": "developer", "content": "x"}, u("Hi"), a("x")], "c.jsonl:5")
    smollm2_without = type(smollm2)(tokenizer_object=smollm2.backend_tokenizer)
    with pytest.raises(UserError, match=r"^c\.jsonl:5: the tokenizer has no chat template"):
        supervise(smollm2_without, [u("Hi"), a("x")], "c.jsonl:5")
