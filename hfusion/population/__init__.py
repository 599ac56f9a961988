"""Arrays whose members come and go while they train, with all that belongs to them."""
