"""Why a sample can be rejected or dropped: the closed list, each explained once.

`rejected` samples could not be read; `dropped` samples were read and then decided against. Filters add
their own reasons through `register`, stages that are named by the user (`leaks_<set>`) through a prefix.
"""

REJECTED: dict[str, str] = {
    "unreadable_shard": "the shard is not a tar archive, or its first header is damaged",
    "truncated_shard": "the shard ends, or breaks, before or inside this sample",
    "missing_image": "no member with an image extension (jpg, jpeg, png, webp)",
    "missing_caption": "no txt member and no caption field in the json member",
    "empty_caption": "the caption holds nothing but white space",
    "undecodable_image": "the bytes are not an image that can be decoded",
    "truncated_image": "the image's data ends early (decode.truncated=keep accepts it)",
    "image_too_large": "more pixels or bytes than decode.max_pixels / decode.max_bytes allow",
    "extreme_aspect": "long side / short side beyond decode.max_aspect",
    "invalid_uid": "the json uid is not 32 hex digits (pool.invalid_uid=synthesise accepts it)",
}

DROPPED: dict[str, str] = {
    "duplicate_uid": "an earlier sample of the pool has the same uid",
    "non_finite_score": "the score is missing, NaN or infinite, so it cannot be ranked",
}


def register(reason: str, explanation: str) -> str:
    """Add a filter's reason to the list; the same reason twice must mean the same thing."""
    if DROPPED.setdefault(reason, explanation) != explanation:
        raise ValueError(f"reason {reason!r} is already explained as {DROPPED[reason]!r}")
    return reason


def explain(reason: str) -> str:
    """One line for any reason that a receipt can hold."""
    known = REJECTED.get(reason) or DROPPED.get(reason)
    if known is None and reason.startswith("leaks_"):
        known = f"too close to an image of the evaluation set {reason[6:]!r}"
    return known or f"dropped by the filter named {reason!r}"
