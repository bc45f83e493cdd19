"""Two sets of results side by side: what differs, by how much, and is it noise?"""
