"""How ranks train together: one file each where one tells the story."""
