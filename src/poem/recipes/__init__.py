"""Methods: the frozen `Recipe`, its text form, and every method by name."""
