"""What can be asked for by name: objectives, their samplers, settings. Needs no torch, so flags are checked by it."""

# Objective -> the samplers that can draw from its models, the default one first.
SAMPLERS_OF = {
    "ddpm": ("ddpm", "ddim", "dpmpp"),
    "flow": ("euler", "heun"),
    "edm": ("heun", "euler", "dpmpp"),
}
ALL_SAMPLERS = tuple(dict.fromkeys(sampler for samplers in SAMPLERS_OF.values() for sampler in samplers))
PREDICTIONS = ("eps", "v")  # what ddpm's network predicts of x_t: the noise, or the velocity
FLOW_TIMES = ("uniform", "logit_normal", "mode")  # how flow's training times are drawn
