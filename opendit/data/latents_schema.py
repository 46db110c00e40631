"""Check the contents of a cache of latents' files before anything is allocated."""

from opendit.common.json_file import COUNT, FILE, MIB, NAME, SHA256, FileKind
from opendit.common.rules import either, listed, mapping, number, one_of, optional, record, string, truth, whole
from opendit.config.data_sources import FOREIGN_FORMS

_RATE = number(0, 1e6, above=True)
_CLIPS = record(
    {"num_frames": whole(1, 1 << 20), "frame_interval": whole(1, 1 << 20), "short_clips": string(64)},
    {"fps": _RATE},
)
_LATENT_SHAPE = listed(whole(1, 1 << 16), 3, 4)
LATENTS_SETTINGS = record(
    {
        "version": COUNT,
        "data": string(64),
        "pictures": COUNT,
        "image_size": whole(1, 1 << 20),
        "vae": string(64),
        "latent_shape": _LATENT_SHAPE,
        "flips": truth,
        "shard_size": whole(1),
    },
    {"precision": string(64), "video": _CLIPS, "text": optional(string(64))},
)
SKIPPED = listed(string(65536))
SHARD = FileKind(
    record({"settings": LATENTS_SETTINGS, "skipped": SKIPPED}),
    16 * MIB,
)
_OF_ONE_SIZE = {
    "count": COUNT,
    "class_names": listed(string(1 << 16), most=10_000_000),
    "image_size": whole(1, 1 << 20),
    "vae": NAME,
    # One number, or one a channel.
    "scaling_factor": either(listed(number(0, 1e6, above=True), 1, 4096), number(0, 1e6, above=True)),
    "shift_factor": either(listed(number(-1e6, 1e6), 1, 4096), number(-1e6, 1e6)),
    "latent_shape": _LATENT_SHAPE,
    "flips": truth,
    "shards": listed(record({"file": FILE, "count": COUNT, "bytes": COUNT}, {"shape_key": COUNT, "sha256": SHA256})),
}
_MORE = {
    "settings": LATENTS_SETTINGS,
    "skipped": SKIPPED,
    "video": _CLIPS,
    "data_fps": _RATE,  # of the files that the clips were read from
    "conditioning": one_of("label", "text"),
    "text": record({"encoder": NAME, "max_tokens": whole(1, 1 << 16)}),
    # Of those that an encoder embedded: how many were looked at, were cut, and the tokens of the longest.
    "captions": record({"rows": COUNT, "counted": COUNT, "cut": COUNT, "longest": COUNT}),
    "checksums": mapping(FILE, SHA256, 1000),  # of the files beside the shards
    # Of tars that another program made: what their arrays hold, and which they are.
    "foreign": record({"form": one_of(*FOREIGN_FORMS), "array": NAME}, {"mirrored": NAME}),
}
_KIND = {"format": string(64), "version": COUNT}
LATENTS_INDEX = FileKind(record(_KIND | _OF_ONE_SIZE, _MORE), 32 * MIB)
# Of tars: an index for every size of the pictures.
LATENTS_SIZES = FileKind(record(_KIND | {"sizes": listed(record(_OF_ONE_SIZE, _MORE), 1, 1000)}), 256 * MIB)
