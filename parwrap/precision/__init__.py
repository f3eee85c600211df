"""Mixed precision: autocast, the dynamic loss scale, half models. Each file with an actor is about one of them."""
