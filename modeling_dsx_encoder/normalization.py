"""One form for each text, and a number for each form: what de-duplication and splits go by."""

import unicodedata
from hashlib import sha1


def normalize_text(text: str) -> str:
    """NFKC, runs of whitespace as one space, nothing around."""
    return " ".join(_visible(unicodedata.normalize("NFKC", text)).split())


def has_text(text: str | None) -> bool:
    """Tell whether anything is there but white space."""
    return bool(text) and bool(_visible(text).strip())


def _visible(text: str) -> str:
    # Byte-order marks and zero-width spaces are no text, and str.split() does not know them as white.
    return text.replace("\ufeff", "").replace("\u200b", "")


def text_fraction(text: str, seed: int = 0) -> float:
    """Give a text its place in [0, 1), the same in every process and on every machine."""
    digest = sha1(f"{seed}\n{normalize_text(text)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
