"""Studies of networks so small that each takes a fraction of a second."""

from flatlens.experiments import Study


def small_study(networks=6, steps=300):
    """One hidden layer of 16 and 40 digits; each training takes all its steps, about a second for 3000."""
    return (
        Study.digits("smoke")
        .setting("data.train", 40)
        .setting("widths", (16,))
        .setting("until.loss_below", None)
        .setting("until.accuracy", None)
        .setting("max_steps", steps)
        .over("lr", 0.05)
        .over("batch_size", 4)
        .over("seed", *range(networks))
    )
