"""MacDonald, Valmadre and Lucey, "On Progressive Sharpening, Flat Minima and Generalisation"."""
