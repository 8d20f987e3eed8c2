"""Code that travels with the miniature: what turns images into patches."""

import numpy as np
import torch
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature

SIDE = 28


class KimiK25VisionProcessor(BaseImageProcessor):
    """Every image becomes 28 x 28 pixels: four patches of 14 x 14, one token."""

    model_input_names = ("pixel_values", "grid_thws")

    def __init__(self, patch_size=14, num_frames_per_chunk=4, **fields):
        super().__init__(**fields)
        self.patch_size = patch_size
        self.num_frames_per_chunk = num_frames_per_chunk

    def media_tokens_calculator(self, media):
        return 1

    def split_video_chunks(self, video):
        step = self.num_frames_per_chunk
        return [video[start : start + step] for start in range(0, len(video), step)]

    def preprocess(self, medias, return_tensors=None):
        patches, grids = [], []
        for media in medias:
            frames = media["video_chunk"] if media["type"] == "video_chunk" else [media["image"]]
            for frame in frames:
                pixels = np.asarray(frame.convert("RGB").resize((SIDE, SIDE)), np.float32) / 255
                tiles = pixels.reshape(2, self.patch_size, 2, self.patch_size, 3)
                patches.append(tiles.transpose(0, 2, 4, 1, 3).reshape(4, 3, *[self.patch_size] * 2))
            grids.append([len(frames), 2, 2])
        return BatchFeature(
            {
                "pixel_values": torch.tensor(np.concatenate(patches)),
                "grid_thws": torch.tensor(grids),
            }
        )
