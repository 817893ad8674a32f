"""What the commands do, apart from parsing and printing: ask through the inbox, read from the store."""
