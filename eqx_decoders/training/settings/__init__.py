"""Settings of training runs, their files and the names of their flags."""
