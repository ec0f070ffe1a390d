"""Quality of pictures: CLIP score, FID, KID."""
