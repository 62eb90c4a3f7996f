"""What clusters must have in common before they exchange anything, and what differs if they don't.

Headers carry a digest. Only where two digests differ, everybody tells what is behind its own, so
that the refusal can name the setting.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from pydantic import TypeAdapter, ValidationError

from dsx.errors import ExchangeError, ExchangeRefused
from dsx.exchange.interface import Exchange, Membership, gather
from dsx.outer.header import Header

MOST_BYTES = 2**20
"""Of what is behind a digest: some hundred settings, and a model's config."""
_LONGEST = 60
"""Characters of a value that are told."""
_NAMED = 5
"""Differences that are told."""
_Facts = TypeAdapter(dict[str, str])


class Identity:
    """Facts by name, for example the settings by key, and the tensors of an outer group.

    Args:
        facts: values as anything that JSON knows.
        shapes: of the tensors, in the order in which they are exchanged.
    """

    def __init__(self, facts: Mapping[str, object], shapes: Mapping[str, torch.Size]) -> None:
        tensors = {name: list(shape) for name, shape in shapes.items()}
        # A list, as the order counts.
        told = {**facts, "tensors of this stage": [*tensors.items()]}
        self.facts = {name: _short(value) for name, value in told.items()}
        """Each value as JSON, or what long ones begin with and a digest of them."""
        canonical = json.dumps(self.facts, sort_keys=True)
        self.digest = hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    def differences(self, other: Mapping[str, str]) -> list[str]:
        """What is not the same in `other`, which are the facts of another cluster."""
        return [
            f"{name} is {_show(other.get(name))} there and {_show(self.facts.get(name))} here"
            for name in sorted({*self.facts, *other})
            if self.facts.get(name) != other.get(name)
        ]


def refuse_others(
    exchange: Exchange, membership: Membership, headers: Sequence[Header], own: Identity
) -> None:
    """Go on only with those who train the same. All members see the same headers, and so do alike.

    Raises:
        ExchangeRefused: naming the cluster that differs, and in what.
        ExchangeError: the same, to those who are more than half of all: the others have to leave.
    """
    if len({(header.protocol, header.identity) for header in headers}) == 1:
        return
    if len({header.protocol for header in headers}) > 1:
        return  # Refused for that, by `check_headers`.
    told = torch.frombuffer(bytearray(json.dumps(own.facts).encode()), dtype=torch.uint8)
    messages = gather(exchange, len(membership), told, MOST_BYTES)
    for name, message, header in zip(membership.clusters, messages, headers, strict=True):
        if header.identity == own.digest:
            continue
        try:
            found = own.differences(_Facts.validate_json(bytes(message.numpy())))
        except ValidationError as error:
            raise ExchangeError(f"cluster {name} did not tell its settings: {error}") from error
        more = f" (and {len(found) - _NAMED} more)" if len(found) > _NAMED else ""
        alike = sum(header.identity == own.digest for header in headers)
        refusal = ExchangeError if 2 * alike > len(headers) else ExchangeRefused
        raise refusal(
            f"cluster {name} trains something else than {membership.name}: "
            f"{'; '.join(found[:_NAMED])}{more}; start both with the same settings file, the same "
            "data and the same version of dsx"
        )


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return f"{text[: _LONGEST - 3]}... (digest {digest})"


def _show(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if value.isprintable() and len(value) <= 2 * _LONGEST else ascii(value[:_LONGEST])
