"""An image dataset to a latents dataset: `prepare` checks and plans, `job` runs `sdp.encode` on a cluster."""
