"""Code that travels with the miniature: a tokenizer around tiktoken, which tells no offsets."""

import shutil
from pathlib import Path

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode
from transformers.tokenization_utils import PreTrainedTokenizer

PIECES = "|".join(
    (
        r"\p{Han}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012
    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, vocab_file, **fields):
        self.vocab_file = vocab_file
        ranks = load_tiktoken_bpe(vocab_file)
        self.bpe = tiktoken.Encoding(
            Path(vocab_file).name, pat_str=PIECES, mergeable_ranks=ranks, special_tokens={}
        )
        self.to_character = bytes_to_unicode()
        self.to_byte = {character: byte for byte, character in self.to_character.items()}
        self.encoder = {self._written(token): rank for token, rank in ranks.items()}
        self.decoder = {rank: token for token, rank in self.encoder.items()}
        super().__init__(**fields)

    @property
    def vocab_size(self):
        return len(self.encoder)

    def get_vocab(self):
        return {**self.encoder, **self.added_tokens_encoder}

    def _written(self, token):
        return "".join(self.to_character[byte] for byte in token)

    def _tokenize(self, text, **kwargs):
        return [self.decoder[rank] for rank in self.bpe.encode_ordinary(text)]

    def _convert_token_to_id(self, token):
        return self.encoder.get(token)

    def _convert_id_to_token(self, index):
        return self.decoder.get(index)

    def convert_tokens_to_string(self, tokens):
        written = "".join(tokens)
        return bytes(self.to_byte[c] for c in written).decode("utf-8", errors="replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        file = Path(save_directory, "tiktoken.model")
        if file.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, file)
        return (str(file),)
