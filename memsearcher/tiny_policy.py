"""The demo's own policy: a small random transformer and a tokenizer for the demo's words.

The vocabulary is the byte alphabet, every word of the demo world with and without a blank in front,
and the protocol's tags. There are no merges: a word is one token, everything else is spelled in
bytes, and decoding gives back any text exactly. A name of one token is what lets a million
parameters copy it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from memsearcher import world, world_questions
from memsearcher.params import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END, START, PAD = "<|im_end|>", "<|im_start|>", "<|pad|>"
PAIRED = ("think", "tool_call", "tool_response", "memory", "question")
TAGS = [f"<{slash}{name}>" for name in PAIRED for slash in ("", "/")] + ["\\boxed{"]
# what agent/prompts.py and agent/teacher.py say around the world's words
SPOKEN = """user assistant system query name arguments search Answer now done find look for answer
    no yes passages empty unknown"""
SIGNS = '{" ": " "} } . , : ; ? [ ]'
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_POSITIONS = 4096


def make(folder: Path, params: Policy, seed: int) -> None:
    """Writes config.json, model.safetensors, the tokenizer. Same arguments, same bytes."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=params.width,
        intermediate_size=3 * params.width,
        num_hidden_layers=params.layers,
        num_attention_heads=params.heads,
        num_key_value_heads=params.heads,
        max_position_embeddings=MAX_POSITIONS,
        attention_bias=True,
        tie_word_embeddings=True,  # as the real policies of this size are: the hard path on export
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def vocabulary() -> list[str]:
    """Whole words and runs of signs as they stand in a text, with the blank in front; without it
    only those that can follow a sign or a newline directly."""
    ours = [*world.words(), *world_questions.WORDS.split(), *SPOKEN.split(), *SIGNS.split()]
    bare = [*world.VALUE_KIND, *SPOKEN.split(), *SIGNS.split(), "boxed"]
    return list(dict.fromkeys([f" {word}" for word in ours] + bare))


def make_tokenizer() -> "PreTrainedTokenizerFast":
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    for text in vocabulary():
        spelled = level.pre_tokenize_str(text)
        if len(spelled) != 1:
            raise ValueError(f"the pre-tokenizer splits {text!r}: it can never be one token")
        pieces.append(spelled[0][0])
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    core.pre_tokenizer = level
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, normalized=False) for t in (PAD, START, END)])
    core.add_tokens([AddedToken(t, normalized=False) for t in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
