"""A small tokenizer of the kind that Llama and Qwen have, trained here, with special and other added tokens."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")
TEXTS = ["system user assistant tool", "Say hello to the tool.", "<think>\nIt is done.\n</think>\nHello, user!\n"] * 20


def make_tokenizer(folder: Path) -> Path:
    """`tokenizer.json` in the folder. It adds <s> in front, cuts after 8 tokens and pads, if it is let."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.add_special_tokens([AddedToken("<|eats|>", rstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def fresh(path: Path) -> Tokenizer:
    """As a trainer would use it on a rendered chat."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
