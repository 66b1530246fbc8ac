"""Decoding of encoded batches that are in no file."""

import numpy as np

from ragged_format.compact.decoder import BatchDecoder

__all__ = ["decode_batch", "decoder_of"]


def decoder_of(encoded, schema):
    """Return what decodes a batch of `encode_batch`."""

    def stored(name):
        array = encoded.column(name)
        start, end = np.frombuffer(array.buffers()[1], np.int64, 2, array.offset * 8)
        return np.frombuffer(array.buffers()[2] or b"", np.uint8)[start:end]

    return BatchDecoder(stored, schema)


def decode_batch(encoded, schema):
    return decoder_of(encoded, schema).batch()
