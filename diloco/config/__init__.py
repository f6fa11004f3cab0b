"""Settings: their schema, their composition with Hydra, and the options of all lower layers made from them."""
