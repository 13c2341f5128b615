"""What one rank holds and sends, decided before anything is allocated: frozen data, for any rank of any world."""
