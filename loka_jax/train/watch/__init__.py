"""What is noticed while a run trains, and what is done about it."""
