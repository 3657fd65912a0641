"""Layers that two images share, and what an archive of `docker save` calls them.

An engine that loads an archive never opens layers that it has, so they may be missing. Engines from 25 on name a layer
`blobs/sha256/<diff id>`; earlier ones `<v1 id>/layer.tar`, where the v1 id of every layer but the last follows from the
diff ids alone (moby 20.10, image/v1/imagev1.go CreateID, image/tarexport/save.go saveImage). A layer under any other
name is sent: more bytes, never a wrong image.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import takewhile

# The v1 configuration of a layer that is not the last one: Go's zero container.Config, in the order of its fields.
_V1_CONFIG = (
    '{"container_config":{"Hostname":"","Domainname":"","User":"","AttachStdin":false,"AttachStdout":false,'
    '"AttachStderr":false,"Tty":false,"OpenStdin":false,"StdinOnce":false,"Env":null,"Cmd":null,"Image":"",'
    '"Volumes":null,"WorkingDir":"","Entrypoint":null,"OnBuild":null,"Labels":null},'
    '"created":"1970-01-01T00:00:00Z","layer_id":%s%s}'
)


def layer_names(layers: Sequence[str], known: int) -> frozenset[str]:
    """Members of the archive that a store with the first `known` of these layers (diff ids) does not need.

    A layer that is repeated further up stays: older engines write it once and link to it.
    """
    names = set[str]()
    for layer, v1 in zip(layers[:known], [*v1_ids(layers[:-1]), ""], strict=False):
        if layer not in layers[known:]:
            names |= {f"{v1}/layer.tar", f"blobs/sha256/{layer.partition(':')[2]}"}
    return frozenset(names)


def v1_ids(layers: Sequence[str]) -> list[str]:
    """Folder names that engines before 25 give to these layers, none of which is an image's last one."""
    chain, parent, ids = "", "", []
    for layer in layers:
        chain = layer if not chain else "sha256:" + hashlib.sha256(f"{chain} {layer}".encode()).hexdigest()
        with_parent = f',"parent":{json.dumps(parent)}' if parent else ""
        config = _V1_CONFIG % (json.dumps(chain), with_parent)
        parent = "sha256:" + hashlib.sha256(config.encode()).hexdigest()
        ids.append(parent.partition(":")[2])
    return ids


def common(layers: Sequence[str], others: Iterable[Sequence[str]]) -> int:
    """How many of `layers`, from the base up, one of the other images shares."""
    pairs = (takewhile(lambda pair: pair[0] == pair[1], zip(layers, other, strict=False)) for other in others)
    return max((len(list(same)) for same in pairs), default=0)
