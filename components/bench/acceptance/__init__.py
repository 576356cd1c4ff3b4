"""How many draft tokens the target accepts, position by position: chains and trees."""
