"""Training the U-Net on latents, or on images that are encoded meanwhile.

Read in this order: `job` (the driver), `launch` and `worker` (Ray Train) or `here` (one process), `assemble` (what one
worker is made of), `trainer` (the loop), `step` (the loss of a batch), `randomness` (the noise of a row), `checkpoint`
(what is saved, and what is written last), `data` (readers: offline, online, collocated), `callbacks` (metrics, samples,
stops).
"""
