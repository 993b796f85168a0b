"""Studies of networks so small that each takes a fraction of a second."""

from concurrent.futures import ThreadPoolExecutor

from flatlens.experiments import Study, run_study


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


def quietly(study, out):
    """The tables of the study, run undisturbed in this process."""
    with ThreadPoolExecutor(1) as executor:
        run_study(study, out, executor=executor)
    return tables(out)


def tables(out):
    """The bytes of what a study ends in."""
    return {name: (out / name).read_bytes() for name in ("table.csv", "relations.csv")}
