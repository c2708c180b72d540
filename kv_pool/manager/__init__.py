"""What a scheduler talks to: requests, their block tables, and the manager that fills them."""
