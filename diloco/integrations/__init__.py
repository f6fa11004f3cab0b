"""Other people's training loops as sites, and other people's evaluation of our models."""
