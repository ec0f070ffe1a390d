"""Quality of pictures (CLIP score, FID, KID), and a checkpoint's loss on held-out data."""
